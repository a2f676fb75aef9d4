"""The CloudEvents SDK for Python against the hub: three modes out, and the same bytes back in."""

import base64
import json
from datetime import datetime, timezone

from cloudevents.core.bindings import http as core
from cloudevents.core.v1.event import CloudEvent
from cloudevents.v1 import http as classic
from system import raw_json

TOPIC = "sdk.python"
STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

JSON_DATA = {
    "plain": {"order": "A-4471", "total": 1299},
    "big integers": {"above 2^63": 2**63 + 1, "above 2^64": 2**64 + 7, "below": -(2**63) - 5},
    "numbers": {"small": 1e-300, "tenth": 0.1, "negative": -0.0, "large": 10**40},
    "unicode": {"ключ": "значение", "emoji": "🪢", "quotes": '"\\/\b\f\n\r\t', "nul": "\u0000"},
    "order": {"z": 1, "a": 2, "m": {"b": 1, "a": [3, 2, 1, [], {}]}},
    "empty": {},
}

EXACT_JSON = {
    "duplicate members": b'{"a":1,"a":2,"b":{"x":1,"x":[]},"a":3}',
    "spaces": b' {\n\t"a" : 1 ,\r\n "b":[ 1 , 2 ]}\n'.strip(),
    "number forms": b'{"a":1.0,"b":1.00,"c":1E5,"d":1e+5,"e":-0,"f":12345678901234567890123456789}',
    "escapes": rb'{"a":"\u0041\u00e9\ud83e\udea2\/"}',
    "array": b"[1,2,3]",
    "string": b'"text"',
    "null": b"null",
    "number": b"18446744073709551616",
}
"""JSON that no serialiser writes, but that some producer has on the wire."""

OTHER_DATA = {
    "text": ("text/plain; charset=utf-8", 'Grüße, 世界 🪢\n\ttab "quoted" \\ end'.encode()),
    "xml": ("application/xml", b"<order id='1'/>"),
    "bytes": ("application/octet-stream", bytes(range(256))),
    "not utf-8 text": ("text/plain", b"caf\xe9"),
    "broken json": ("application/json", b'{"a":'),
}


def attributes(name, content_type="application/json"):
    """The attributes of an event, extensions of all sorts among them."""
    return {
        "specversion": "1.0",
        "id": f'py {name} é%"',
        "source": "/interop/python",
        "type": "sdk.tried.v1",
        "subject": f"{name} ☂ 100%",
        "time": datetime(2026, 12, 1, 10, 0, 0, 123456, tzinfo=timezone.utc),
        "datacontenttype": content_type,
        "dataschema": "https://example.com/schemas/order.json",
        "partitionkey": f"key-{name}",
        "traceparent": TRACE,
        "tracestate": "vendor=value,other=1",
        "myextension": 'naïve "ext" 100% 🪢',
    }


class Sent:
    """An event that was published, and what must come back."""

    def __init__(self, attributes, data, content_type, exact_document=None):
        self.attributes = attributes
        self.data = data
        self.content_type = content_type
        self.exact_document = exact_document


def text_of(value):
    """An attribute as the JSON format writes it."""
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return value


def publish_binary(client, sent):
    """Publishes data of every sort in binary mode."""
    for name, (content_type, data) in everything().items():
        event = CloudEvent(attributes(f"binary {name}", content_type), data)
        message = core.to_binary_event(event)
        assert message.body == data, "the SDK sends bytes as they are"
        account = client.publish(TOPIC, message.body, message.headers)
        assert account["accepted"] == 1, account
        sent[event.get_id()] = Sent(event.get_attributes(), data, content_type)


def publish_structured(client, sent):
    """Publishes in structured mode: JSON values, text, bytes, and documents the SDK cannot make."""
    for name, value in JSON_DATA.items():
        event = CloudEvent({**attributes(f"structured {name}"), "number": 7, "flag": True}, value)
        document = core.to_structured_event(event)
        client.publish(TOPIC, document.body, document.headers)
        sent[event.get_id()] = Sent(None, None, None, document.body)
    for name, (content_type, data) in OTHER_DATA.items():
        if content_type == "application/json":
            continue
        event = CloudEvent(attributes(f"structured {name}", content_type), data)
        document = core.to_structured_event(event)
        client.publish(TOPIC, document.body, document.headers)
        sent[event.get_id()] = Sent(None, None, None, document.body)
    # The older interface of the same SDK, which most programs still use.
    event = classic.CloudEvent(
        {"id": "py classic", "source": "/interop/python", "type": "sdk.tried.v1"}, {"big": 2**70}
    )
    headers, body = classic.to_structured(event)
    client.publish(TOPIC, body, headers)
    sent["py classic"] = Sent(None, None, None, body)


def publish_batch(client, sent):
    """Publishes a batch of all values, laid out with spaces and with duplicate members."""
    documents = []
    for name, value in JSON_DATA.items():
        event = CloudEvent(attributes(f"batch {name}"), value)
        documents.append((event.get_id(), core.to_structured_event(event).body))
    for name, data in EXACT_JSON.items():
        head = json.dumps({"id": f"py batch exact {name}", "source": "/interop/python"})
        document = head[:-1].encode() + b', "type":"sdk.tried.v1" ,"data" : ' + data
        document += b' , "specversion":"1.0", "ext":12345, "later":"member"\n}'
        documents.append((f"py batch exact {name}", document))
    body = b"[\n  " + b" ,\n\t".join(document for _, document in documents) + b"\n]\n"
    account = client.publish(TOPIC, body, {"content-type": BATCH})
    assert account["accepted"] == len(documents), account
    assert account["duplicates"] == 0, account
    again = client.publish(TOPIC, body, {"content-type": BATCH})
    assert again["accepted"] == 0 and again["duplicates"] == len(documents), again
    for identity, document in documents:
        sent[identity] = Sent(None, None, None, document)


def everything():
    """All payloads as (content type, bytes)."""
    all_data = {name: ("application/json", json.dumps(v).encode()) for name, v in JSON_DATA.items()}
    all_data |= {name: ("application/json", data) for name, data in EXACT_JSON.items()}
    all_data["vendor json"] = (
        "application/vnd.shop+json; charset=utf-8",
        b'{"big":9223372036854775809}',
    )
    return all_data | OTHER_DATA


def check_document(document, sent):
    """Holds one returned document, raw, against what was published."""
    if sent.exact_document is not None:
        assert document.encode() == sent.exact_document, (
            f"changed on the way:\n  {sent.exact_document!r}\n  {document.encode()!r}"
        )
        return
    members = dict(raw_json.members(document))
    assert len(members) == len(raw_json.members(document)), f"a member was doubled: {document}"
    for name, value in sent.attributes.items():
        assert json.loads(members[name]) == text_of(value), f"{name}: {members.get(name)}"
    if sent.content_type.endswith("json") or "+json" in sent.content_type:
        try:
            json.loads(sent.data)
        except ValueError:
            pass  # not JSON, whatever its type says: must arrive as bytes
        else:
            assert members["data"].encode() == sent.data, f"{members['data']!r} != {sent.data!r}"
            return
    if "data" in members:
        assert json.loads(members["data"]).encode() == sent.data, members["data"]
    else:
        assert base64.b64decode(json.loads(members["data_base64"])) == sent.data


def check_parsed(document, sent):
    """Both interfaces of the SDK must read what the hub returned."""
    event = core.from_structured_event(
        core.HTTPMessage({"content-type": STRUCTURED}, document.encode())
    )
    older = classic.from_json(document)
    assert event.get_id() == older["id"]
    assert event.get_type() == older["type"] == "sdk.tried.v1"
    plain = json.loads(document)
    assert event.get_extension("partitionkey") == plain.get("partitionkey")
    if "data" in plain:
        assert event.get_data() == plain["data"] == older.data
    elif sent.data is not None:
        assert event.get_data() == sent.data == older.data
    # What was read can be sent on in either mode.
    assert core.to_structured_event(event).body
    if isinstance(event.get_data(), (dict, str, bytes)):
        assert core.to_binary_event(event).headers["ce-id"]


def returned_by_reading(client, topic):
    """All documents of a topic by long poll, raw, in pages of 7."""
    documents, after = [], "earliest"
    while True:
        body, after = client.read(topic, after, limit=7)
        if body is None:
            return documents
        page = raw_json.items(raw_json.member(body.decode(), "events"))
        if not page:
            return documents
        documents += page


def returned_by_leasing(client, topic, group):
    """All documents of a topic by lease, raw; each is acknowledged."""
    documents = []
    while True:
        body = client.lease_raw(topic, group, max=9).decode()
        deliveries = raw_json.items(raw_json.member(body, "deliveries"))
        if not deliveries:
            return documents
        leases = [json.loads(raw_json.member(delivery, "lease")) for delivery in deliveries]
        documents += [raw_json.member(delivery, "event") for delivery in deliveries]
        assert client.ack(leases) == {"acked": leases, "stale": []}


def check(hub):
    """Publishes in all modes, and reads back by both doors."""
    client = hub.client()
    sent = {}
    publish_binary(client, sent)
    publish_structured(client, sent)
    publish_batch(client, sent)
    read = returned_by_reading(client, TOPIC)
    leased = returned_by_leasing(client, TOPIC, "python")
    assert sorted(read) == sorted(leased), "both doors must show the same documents"
    for documents in (read, leased):
        by_id = {json.loads(document)["id"]: document for document in documents}
        assert sorted(by_id) == sorted(sent), set(by_id) ^ set(sent)
        for identity, document in by_id.items():
            check_document(document, sent[identity])
            check_parsed(document, sent[identity])
    return f"{len(sent)} events"


def check_foreign(hub, topic):
    """Parses what another SDK published."""
    documents = returned_by_reading(hub.client(), topic)
    assert documents, f"{topic} is empty"
    for document in documents:
        core.from_structured_event(
            core.HTTPMessage({"content-type": STRUCTURED}, document.encode())
        )
        classic.from_json(document)
    return f"{len(documents)} events"
