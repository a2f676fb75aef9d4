// The CloudEvents SDK for JavaScript against the hub: three modes out, the same bytes back in.
//
//   node sdk.mjs HUB_URL [TOPIC_OF_ANOTHER_SDK]

import assert from "node:assert/strict";
import { CloudEvent, HTTP } from "cloudevents";
import { items, member, members } from "./raw_json.mjs";

const [hub, foreignTopic] = process.argv.slice(2);
const TOPIC = "sdk.javascript";
const STRUCTURED = "application/cloudevents+json";
const BATCH = "application/cloudevents-batch+json";
const TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/** JSON as text, since JavaScript's own numbers cannot hold the first one. */
const EXACT_JSON = {
  "big integers": '{"above":9223372036854775809,"far":123456789012345678901234567890,"below":-9223372036854775813}',
  "duplicate members": '{"a":1,"a":2,"b":{"x":1,"x":[]},"a":3}',
  "spaces": '{\n\t"a" : 1 ,\r\n "b":[ 1 , 2 ]}',
  "number forms": '{"a":1.0,"b":1.00,"c":1E5,"d":1e+5,"e":-0}',
  "member order": '{"z":1,"a":2,"10":3,"2":4}',
  "unicode": '{"ключ":"значение","emoji":"🪢","escaped":"\\u0041\\ud83e\\udea2\\/"}',
};

const OBJECTS = {
  "plain": { order: "A-4471", total: 1299 },
  "unicode": { "ключ": "значение", emoji: "🪢", quotes: '"\\/\b\f\n\r\t\u0000' },
  "nested": { z: 1, a: { list: [3, 2, 1, [], {}], none: null, yes: true } },
  "empty": {},
};

const TEXTS = {
  "text": ["text/plain; charset=utf-8", 'Grüße, 世界 🪢\n\t"quoted" \\ end'],
  "xml": ["application/xml", "<order id='1'/>"],
};

const BYTES = new Uint8Array(256).map((_, i) => i);

function event(name, more) {
  return new CloudEvent({
    id: `js ${name}`,
    source: "/interop/javascript",
    type: "sdk.tried.v1",
    subject: name,
    time: "2026-12-01T10:00:00.123Z",
    datacontenttype: "application/json",
    partitionkey: `key-${name}`,
    traceparent: TRACE,
    tracestate: "vendor=value,other=1",
    ...more,
  });
}

async function call(method, path, body, headers) {
  const response = await fetch(hub + path, { method, body, headers });
  const text = await response.text();
  assert.ok(response.ok, `${method} ${path}: ${response.status} ${text}`);
  return { response, text };
}

async function publish(message) {
  const { response, text } = await call("POST", `/v1/topics/${TOPIC}/events`, message.body, message.headers);
  assert.equal(response.status, 201);
  return JSON.parse(text);
}

/** id → check of the raw document that came back. */
const sent = new Map();

async function publishBinary() {
  const payloads = [
    ...Object.entries(EXACT_JSON).map(([name, text]) => [`exact ${name}`, "application/json", text]),
    ...Object.entries(OBJECTS).map(([name, value]) => [name, "application/json", value]),
    ...Object.entries(TEXTS).map(([name, [type, text]]) => [name, type, text]),
    ["bytes", "application/octet-stream", BYTES],
  ];
  for (const [name, datacontenttype, data] of payloads) {
    const made = event(`binary ${name}`, { datacontenttype, data, myextension: "value 100%25" });
    const message = HTTP.binary(made);
    assert.deepEqual((await publish(message)).accepted, 1);
    sent.set(made.id, (document) => {
      const found = Object.fromEntries(members(document));
      for (const name of ["id", "source", "type", "subject", "time", "partitionkey", "traceparent", "tracestate"]) {
        assert.equal(JSON.parse(found[name]), made[name], name);
      }
      assert.equal(JSON.parse(found.myextension), "value 100%", "header values are percent-decoded");
      assert.equal(JSON.parse(found.datacontenttype), message.headers["content-type"]);
      if (datacontenttype === "application/json") assert.equal(found.data, message.body);
      else if (typeof data === "string") assert.equal(textOf(found), data);
      else assert.deepEqual(new Uint8Array(Buffer.from(JSON.parse(found.data_base64), "base64")), data);
    });
  }
}

/** Non-JSON data: a JSON string, or base64; both are lossless. */
function textOf(found) {
  if (found.data !== undefined) return JSON.parse(found.data);
  return Buffer.from(JSON.parse(found.data_base64), "base64").toString();
}

async function publishStructured() {
  const made = [
    ...Object.entries(OBJECTS).map(([name, data]) => event(`structured ${name}`, { data, number: 7, flag: true })),
    ...Object.entries(TEXTS).map(([name, [datacontenttype, data]]) => event(`structured ${name}`, { datacontenttype, data })),
    event("structured bytes", { datacontenttype: "application/octet-stream", data: BYTES }),
  ];
  for (const one of made) {
    const message = HTTP.structured(one);
    await publish(message);
    sent.set(one.id, (document) => assert.equal(document, message.body));
  }
}

async function publishBatch() {
  // The SDK reads batches but makes none: a batch is its structured documents in an array.
  const documents = Object.entries(OBJECTS).map(([name, data]) => HTTP.structured(event(`batch ${name}`, { data })).body);
  for (const [name, text] of Object.entries(EXACT_JSON)) {
    documents.push(
      `{ "data":${text},"id":"js batch exact ${name}" ,"specversion":"1.0",\n"type":"sdk.tried.v1","source":"/interop/javascript","ext":12 }`,
    );
  }
  const message = { headers: { "content-type": BATCH }, body: `[ ${documents.join(" ,\n")}]` };
  assert.equal((await publish(message)).accepted, documents.length);
  for (const document of documents) {
    sent.set(JSON.parse(document).id, (returned) => assert.equal(returned, document));
  }
}

/** The raw documents of a topic by long poll, each page also read as a batch by the SDK. */
async function read(topic) {
  const documents = [];
  let after = "earliest";
  for (;;) {
    const path = `/v1/topics/${topic}/events?after=${encodeURIComponent(after)}&limit=7&wait=0s`;
    const { response, text } = await call("GET", path);
    after = response.headers.get("carrick-position");
    const page = response.status === 204 ? "[]" : member(text, "events");
    if (items(page).length === 0) return documents;
    const batch = HTTP.toEvent({ headers: { "content-type": BATCH }, body: page });
    assert.equal(batch.length, items(page).length);
    documents.push(...items(page));
  }
}

/** The raw documents of a topic by lease; each is acknowledged. */
async function lease(topic, group) {
  const documents = [];
  const json = { "content-type": "application/json" };
  for (;;) {
    const body = JSON.stringify({ max: 9, wait: "0s", lease: "30s" });
    const { text } = await call("POST", `/v1/topics/${topic}/groups/${group}/lease`, body, json);
    const deliveries = items(member(text, "deliveries"));
    if (deliveries.length === 0) return documents;
    documents.push(...deliveries.map((delivery) => member(delivery, "event")));
    const leases = deliveries.map((delivery) => JSON.parse(member(delivery, "lease")));
    const acked = await call("POST", "/v1/leases/ack", JSON.stringify({ leases }), json);
    assert.deepEqual(JSON.parse(acked.text), { acked: leases, stale: [] });
  }
}

/** The SDK must read a document, and find in it what the document says. */
function parse(document) {
  const parsed = HTTP.toEvent({ headers: { "content-type": STRUCTURED }, body: document });
  const plain = JSON.parse(document);
  for (const name of ["id", "source", "type", "subject", "partitionkey", "traceparent"]) {
    assert.equal(parsed[name], plain[name], name);
  }
  if (plain.data !== undefined && plain.data !== null && typeof plain.data === "object") {
    assert.deepEqual(parsed.data, plain.data);
  }
  if (plain.data_base64 !== undefined) {
    assert.deepEqual(Buffer.from(parsed.data), Buffer.from(plain.data_base64, "base64"));
  }
}

await publishBinary();
await publishStructured();
await publishBatch();
const wasRead = await read(TOPIC);
const wasLeased = await lease(TOPIC, "javascript");
assert.deepEqual([...wasRead].sort(), [...wasLeased].sort(), "both doors must show the same documents");
assert.deepEqual(wasRead.map((document) => JSON.parse(document).id).sort(), [...sent.keys()].sort());
for (const document of wasRead) {
  sent.get(JSON.parse(document).id)(document);
  parse(document);
}
let foreign = 0;
if (foreignTopic) {
  for (const document of await read(foreignTopic)) {
    HTTP.toEvent({ headers: { "content-type": STRUCTURED }, body: document });
    foreign++;
  }
  assert.ok(foreign > 0, `${foreignTopic} is empty`);
}
console.log(`${sent.size} events, ${foreign} of another SDK`);
