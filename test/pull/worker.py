"""A pull worker in nothing but Python's standard library.

    TENURE_URL=http://localhost:8080 TENURE_TOKEN=tenure_worker_... python3 worker.py words

It pulls items of the queue, one at a time, and sends heartbeats from a thread of its own. What it does
with an item is `handle`; everything else is the protocol. On SIGTERM it closes its session, so that
others get at once what it holds; when it is killed they get it after its lease.
"""

import json
import os
import signal
import sys
import threading
import urllib.error
import urllib.request

BASE = os.environ["TENURE_URL"].rstrip("/") + "/tenure/v1"
TOKEN = os.environ["TENURE_TOKEN"]
ending = threading.Event()


def call(method, path, body=None):
    request = urllib.request.Request(
        BASE + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": "Bearer " + TOKEN, "content-type": "application/json"},
    )
    for pause in (0.2, 1, 3, None):
        try:
            # Longer than a poll waits.
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            # Not now, or not that process. Any other status is an answer.
            if error.code != 503 or pause is None:
                raise
        except OSError:
            if pause is None:
                raise
        # A call whose answer was lost may be repeated: a second settlement changes nothing.
        ending.wait(pause)


class Business(Exception):
    """An error that is an answer."""


class Session:
    def __init__(self, queue):
        opened = call("POST", "/sessions", {"worker": "python", "queues": [queue], "slots": 2})
        self.path = "/sessions/" + opened["id"]
        self.every = opened["heartbeatMillis"] / 1000
        self.cancelled = set()
        self.over = threading.Event()
        threading.Thread(target=self.beat, daemon=True).start()
        say("session", opened["id"])

    def beat(self):
        while not self.over.wait(self.every):
            try:
                self.cancelled.update(call("POST", self.path + "/heartbeat")["cancelled"])
            except OSError as error:
                say("heartbeat", error)  # The next one may get through: there is time for three.

    def close(self):
        self.over.set()
        call("DELETE", self.path)
        say("closed")

    def pull(self):
        return call("POST", self.path + "/pull", {"wanted": 1, "waitMillis": 20000})["items"]

    def execute(self, item):
        def about(verb, **body):
            path = self.path + "/items/" + item["id"] + "/" + verb
            return call("POST", path, {"executionSeq": item["executionSeq"], **body})

        try:
            about("activate")
            say("executing", item["id"])
            try:
                about("complete", result=handle(item, self))
            except Business as error:
                about("business-error", code=str(error))
            except Exception as error:
                about("fail", message=repr(error), retriesLeft=max(0, 3 - item["failures"]))
            say("settled", item["id"])
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise
            # Somebody else has it, or it has an outcome: drop what was computed.
            say("stale", json.load(error)["reason"])


def handle(item, session):
    words = item["payload"]["text"].split()
    if words[0] == "unreadable":
        raise Business("Unreadable")
    if words[0] == "flaky" and item["failures"] == 0:
        raise RuntimeError("the first time it always fails")
    if words[0] == "deadly" and item["losses"] == 0:
        ending.wait()
    if words[0] == "slow" and item["losses"] == 0:
        ending.wait(1)
    while words[0] == "endless":
        if item["id"] in session.cancelled:
            raise RuntimeError("told to stop")
        ending.wait(0.05)
    return {"words": len(words), "losses": item["losses"]}


def say(*what):
    print(">", *what, flush=True)


def main(queue):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        session = Session(queue)
        try:
            while True:
                for item in session.pull():
                    session.execute(item)
        except urllib.error.HTTPError as error:
            # Heartbeats did not get through for too long: what it held is somebody else's.
            session.over.set()
            if error.code != 404:
                raise
        except SystemExit:
            session.close()
            raise


if __name__ == "__main__":
    main(sys.argv[1])
