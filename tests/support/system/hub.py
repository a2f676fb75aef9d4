"""The hub: its process, and a client for its HTTP interface on Python's own library."""

import http.client
import json
import os
from urllib.parse import quote, urlencode, urlsplit

from .processes import free_port
from .report import wait_until

CARRICK = os.environ.get("CARRICK_BIN", "target/release/carrick")


SETTINGS = (
    # A hub on a database must be given its key; this one seals nothing but a test's positions.
    f"seal-key={'5e' * 32}",
    # Nobody balances load to it, so nobody needs time to see that it is leaving.
    "drain.window=0s",
)


class Unavailable(Exception):
    """The hub did not answer, or said 5xx or 429: the effect of the call is not known."""


class Refused(Exception):
    """The hub answered with an error that a repeat would meet again."""

    def __init__(self, status, body):
        super().__init__(f"{status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body

    def problem(self):
        """The problem+json."""
        return json.loads(self.body)


class Client:
    """One kept-alive connection to a hub; reconnects by itself, never repeats a call by itself."""

    def __init__(self, url, timeout=40.0):
        parts = urlsplit(url)
        self.host, self.port, self.timeout = parts.hostname, parts.port, timeout
        self.connection = None

    def call(self, method, path, body=None, headers=None):
        """Returns (status, headers with lower-case names, body) of any answer below 500."""
        try:
            if self.connection is None:
                self.connection = http.client.HTTPConnection(
                    self.host, self.port, timeout=self.timeout
                )
            self.connection.request(method, path, body=body, headers=headers or {})
            response = self.connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unavailable(f"{method} {path}: {error!r}") from error
        if response.status >= 500 or response.status == 429:
            raise Unavailable(f"{method} {path}: {response.status} {answer[:200]!r}")
        return response.status, {k.lower(): v for k, v in response.getheaders()}, answer

    def close(self):
        """Drops the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _json(self, path, value):
        status, _, body = self.call(
            "POST", path, json.dumps(value), {"content-type": "application/json"}
        )
        return status, body

    def publish(self, topic, body, headers):
        """Publishes in any CloudEvents mode; returns the hub's account of it."""
        status, _, answer = self.call("POST", f"/v1/topics/{quote(topic)}/events", body, headers)
        if status != 201:
            raise Refused(status, answer)
        return json.loads(answer)

    def read(self, topic, after="earliest", limit=1000, wait="0s"):
        """One long poll: (raw body or None if nothing came, position to go on from)."""
        query = urlencode({"after": after, "limit": limit, "wait": wait})
        status, headers, body = self.call("GET", f"/v1/topics/{quote(topic)}/events?{query}")
        if status not in (200, 204):
            raise Refused(status, body)
        return (body if status == 200 else None), headers["carrick-position"]

    def read_all(self, topic):
        """Every event of a topic, from its start to its present end, decoded."""
        events, after = [], "earliest"
        while True:
            body, after = self.read(topic, after)
            if body is None:
                return events
            page = json.loads(body)
            assert page["position"] == after, "body and header must name one position"
            if not page["events"]:
                return events
            events += page["events"]

    def lease_raw(self, topic, group, max=100, wait="0s", lease="30s"):
        """Leases deliveries; returns the answer's body as it came."""
        path = f"/v1/topics/{quote(topic)}/groups/{quote(group)}/lease"
        status, body = self._json(path, {"max": max, "wait": wait, "lease": lease})
        if status != 200:
            raise Refused(status, body)
        return body

    def lease(self, topic, group, max=100, wait="0s", lease="30s"):
        """Leases deliveries; returns them decoded."""
        return json.loads(self.lease_raw(topic, group, max, wait, lease))["deliveries"]

    def ack(self, leases):
        """Acknowledges; returns the account {acked, stale}, also when all are stale."""
        return self._settle("ack", {"leases": leases})

    def nack(self, leases, delay="0s", reason=""):
        """Gives deliveries back."""
        return self._settle("nack", {"leases": leases, "delay": delay, "reason": reason})

    def extend(self, leases, lease):
        """Holds deliveries longer."""
        return self._settle("extend", {"leases": leases, "lease": lease})

    def _settle(self, verb, value):
        status, body = self._json(f"/v1/leases/{verb}", value)
        if status not in (200, 409):
            raise Refused(status, body)
        return json.loads(body)


class Hub:
    """A hub process on a private port; killed and started again, it keeps port and store."""

    READY_PATIENCE = 30.0

    def __init__(self, scene, store):
        self.scene = scene
        self.url = f"http://127.0.0.1:{free_port()}"
        listen = self.url.removeprefix("http://")
        command = [CARRICK, "up", "--listen", listen, "--store", store]
        for setting in SETTINGS:
            command += ["--set", setting]
        self.process = scene.process("hub", command)

    def start(self):
        """Starts it and waits until it says that it is ready."""
        self.process.start()
        self.wait_ready()
        return self

    def wait_ready(self):
        """Waits for `/readyz`; fails at once if the process ends instead."""
        wait_until("the hub is ready", self.ready, self.READY_PATIENCE, 0.05, self.process.check)

    def ready(self):
        """Whether `/readyz` says so at this moment."""
        client = Client(self.url, timeout=5.0)
        try:
            return client.call("GET", "/readyz")[0] == 200
        except Unavailable:
            return False
        finally:
            client.close()

    def client(self):
        """A new connection."""
        return Client(self.url)
