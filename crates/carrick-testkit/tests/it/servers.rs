use std::time::Duration;

use carrick_testkit::servers::{ChildProcess, PostgresDatabase, Ready, SpawnError, free_port};
use sqlx::{Connection, PgConnection, Row};
use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(20);

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

#[tokio::test]
async fn a_child_is_ready_at_its_line_and_gone_after_kill_9() {
    let script = "echo starting; echo ready on 7070 >&2; exec tail -f /dev/null";
    let child = ChildProcess::spawn(shell(script), Ready::Line("ready on".to_owned()), PATIENCE)
        .await
        .unwrap();
    assert_eq!(child.wait_for_line("ready", PATIENCE).await.unwrap(), "ready on 7070");
    assert!(child.wait_for_line("starting", PATIENCE).await.is_some(), "lines of the past count");
    let exited = child.kill_9().await.unwrap();
    assert!(!exited.status.success());
    assert!(exited.output.contains("starting\n"));
}

#[tokio::test]
async fn a_signal_reaches_the_child() {
    let script = "trap 'echo got it; exit 7' TERM; echo ready; while :; do sleep 0.05; done";
    let child = ChildProcess::spawn(shell(script), Ready::Line("ready".to_owned()), PATIENCE)
        .await
        .unwrap();
    child.signal("TERM").await.unwrap();
    let exited = child.exited(PATIENCE).await.unwrap();
    assert_eq!(exited.status.code(), Some(7));
    assert!(exited.output.ends_with("got it\n"), "{}", exited.output);
}

#[tokio::test]
async fn a_child_that_ends_before_it_is_ready_says_what_it_said() {
    let ready = Ready::Line("ready".to_owned());
    let error =
        ChildProcess::spawn(shell("echo no luck; exit 3"), ready, PATIENCE).await.unwrap_err();
    assert!(matches!(error, SpawnError::Ended { .. }), "{error}");
    assert!(error.to_string().contains("no luck"), "{error}");
}

#[tokio::test]
async fn a_child_that_never_gets_ready_is_given_up() {
    let ready = Ready::Listens(format!("127.0.0.1:{}", free_port().unwrap()));
    let patience = Duration::from_millis(200);
    let error =
        ChildProcess::spawn(shell("exec tail -f /dev/null"), ready, patience).await.unwrap_err();
    assert!(matches!(error, SpawnError::NotReady { .. }), "{error}");
}

#[tokio::test]
async fn a_program_that_is_not_there_is_an_error() {
    let command = Command::new("carrick-has-no-such-program");
    let error = ChildProcess::spawn(command, Ready::AtOnce, PATIENCE).await.unwrap_err();
    assert!(matches!(error, SpawnError::Start { .. }), "{error}");
}

#[tokio::test]
#[ignore = "needs Postgres"]
async fn a_test_has_a_database_of_its_own_until_it_ends() {
    let database = PostgresDatabase::create().await;
    let other = PostgresDatabase::create().await;
    let mut connection = PgConnection::connect(database.url()).await.unwrap();
    let exists = "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)";
    let name = other.url().rsplit('/').next().unwrap().split('?').next().unwrap().to_owned();
    let row = sqlx::query(exists).bind(&name).fetch_one(&mut connection).await.unwrap();
    assert!(row.get::<bool, _>(0));
    let _still_connected = PgConnection::connect(other.url()).await.unwrap();
    drop(other);
    let row = sqlx::query(exists).bind(&name).fetch_one(&mut connection).await.unwrap();
    assert!(!row.get::<bool, _>(0), "dropped, though somebody was still connected");
}
