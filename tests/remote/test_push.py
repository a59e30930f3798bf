"""Pushes that are killed, interrupted, disturbed or repeated: nothing is lost, nothing doubled."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from tests.remote.conftest import (
    S3_ENV,
    Between,
    Spot,
    at_s3,
    contents,
    draft,
    numbered,
    objects,
    pulled,
    push,
    records,
    there,
)
from tests.store.samples import Child, put_entry
from tests.store.samples import add as add_sample
from tests.store.samples import metadata as record_with

from modulelens.errors import Conflict, Corrupted, DiskFull, PermissionDenied, Unavailable
from modulelens.records import collection_id
from modulelens.store import LocalStore
from modulelens.store.files import digest_of
from modulelens.store.remote import Draft, Remote, Version, open_remote
from modulelens.store.remote.outbox import FAILED, SENT, WAITING, Outbox
from modulelens.store.remote.pull import pull
from modulelens.store.remote.push import Progress, Pushed, Pusher, record_of, send
from modulelens.store.remote.spool import sweep
from modulelens.store.remote.spread import spread

ROOT = Path(__file__).parents[2]
FIRST = collection_id("net", "first")
KILLS = int(os.environ.get("MODULELENS_KILLS", "8"))


def url_in(folder: Path) -> str:
    return f"file://{folder}/team"


def drain(store: LocalStore, remote: Remote, **how) -> Pushed:
    Outbox(store.outbox_path).ask(remote.url, records(store))
    return Pusher(store, remote.url, remote=remote, **how).drain()


# ---- killed


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spot]:
    with at_s3(tmp_path_factory.mktemp("s3")) as spot:
        yield spot


@pytest.fixture
def killer(s3: Spot) -> Iterator[subprocess.Popen[str]]:
    """Forks pushes; see `kill_push`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.remote.kill_push"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.communicate()


def killed(killer: subprocess.Popen[str], store: LocalStore, url: str, after_s: float) -> bool:
    """Whether a push was killed that began so long ago; False: it had ended well before."""
    assert killer.stdin
    assert killer.stdout
    killer.stdin.write(f"{store.root} {url}\n")
    killer.stdin.flush()
    child = int(killer.stdout.readline())
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    killer.stdin.write("reap\n")  # until then its number is no other process's
    killer.stdin.flush()
    said = list(iter(lambda: killer.stdout.readline().strip(), "ended"))
    assert said in ([], ["done"])
    return not said


@pytest.mark.parametrize(("kind", "kills"), [("file", KILLS), ("s3", KILLS // 3)])
def test_kills_at_random_moments(
    s3: Spot,
    killer: subprocess.Popen[str],
    store: LocalStore,
    tmp_path: Path,
    kind: str,
    kills: int,
) -> None:
    numbers = itertools.count()
    fresh = lambda: f"file://{tmp_path}/team{next(numbers)}"  # noqa: E731
    if kind == "s3":
        fresh = s3.fresh
    for number in range(2):
        add_sample(store, "more", "layer", blobs=(b"%d" % number * 50, b"same" * 9))
    url = fresh()
    started = time.monotonic()
    push(copied(store, tmp_path / "whole"), url)
    takes = time.monotonic() - started
    once = objects_of(url)
    rng = random.Random(kind)
    for number in itertools.count():
        if kills <= 0:
            break
        url, mine = fresh(), copied(store, tmp_path / f"round{number}")
        for _ in range(3):
            kills -= killed(killer, mine, url, rng.random() * takes * 0.9)
        done = push(mine, url)
        assert (done.waiting, done.failed) == (0, ())
        assert not Outbox(mine.outbox_path).all(url, (WAITING, FAILED))
        # The same objects as without a kill: no number, file or pack more or less.
        assert objects_of(url).keys() == once.keys()
        assert push(mine, url) == Pushed(known=8)
        if number == 0:
            assert contents(pulled(open_remote(url), tmp_path / "back")) == contents(store)


def objects_of(url: str) -> dict[str, bytes]:
    scheme, _, path = url.partition("://")
    if scheme == "file":
        return objects(Path(path))
    import fsspec

    names = fsspec.filesystem("s3").find(path)
    return dict.fromkeys((name[len(path) + 1 :] for name in names), b"")


def copied(store: LocalStore, folder: Path) -> LocalStore:
    shutil.copytree(store.root, folder, ignore=shutil.ignore_patterns("outbox.sqlite*"))
    return LocalStore(folder)


# ---- interrupted


NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
WAITS = """
import sys
from pathlib import Path
from modulelens.store import LocalStore
from modulelens.store.remote.push import send
store = LocalStore(Path(sys.argv[1]))
send(store, "s3://team/modules", [store.metadata(row.id) for row in store.find()])
"""


def test_ctrl_c_ends_a_push_to_a_server_that_hangs(store: LocalStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        environment = S3_ENV | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}
        child = subprocess.Popen(
            [sys.executable, "-c", WAITS, str(store.root)],
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        # The first question, whether there is a remote, is answered; those of the threads are not.
        try:
            first, _ = server.accept()
            with first:
                assert b"format.json" in first.recv(1000)
                first.sendall(NOT_FOUND)
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1000)
                time.sleep(0.3)
                started = time.monotonic()
                child.send_signal(signal.SIGINT)
                _, said = child.communicate(timeout=20)
        finally:
            child.kill()
    assert time.monotonic() - started < 3
    assert "KeyboardInterrupt" in said
    assert child.returncode in (1, 130, -signal.SIGINT)
    assert len(Outbox(store.outbox_path).all("s3://team/modules", (WAITING,))) == 6


def test_ctrl_c_does_not_wait_for_threads() -> None:
    entered, free = threading.Semaphore(0), threading.Event()

    def hang(_: int) -> None:
        entered.release()
        free.wait(30)

    def interrupt() -> None:
        for _ in range(4):
            entered.acquire()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        spread(hang, range(50), 4)
    assert time.monotonic() - started < 10
    free.set()
    thread.join()


def test_spread_keeps_the_order_and_raises_the_first_failure() -> None:
    def work(number: int) -> int:
        time.sleep(0.001 * (number % 3))
        if number in (7, 40):
            raise ValueError(number)
        return number * 2

    assert spread(work, range(5)) == [0, 2, 4, 6, 8]
    assert spread(work, []) == []
    seen: list[int] = []
    with pytest.raises(ValueError, match="7"):
        spread(lambda n: seen.append(n) or work(n), range(1000), 4)
    assert len(seen) < 100


# ---- disturbed


class Failing(Between):
    """Raises an error in some calls of `put`."""

    def __init__(
        self, remote: Remote, error: Exception, *, after: int = 0, times: int = 99
    ) -> None:
        super().__init__(remote)
        self.error, self.after, self.times = error, after, times
        self.packs: list[str] = []

    def put(self, draft: Draft, **how) -> Version:
        self.after -= 1
        if self.after < 0 < self.times:
            self.times -= 1
            raise self.error
        return self.remote.put(draft, **how)

    def put_packs(self, packs, **how):
        self.packs += [pack.name for pack in packs.values()]
        return self.remote.put_packs(packs, **how)


def test_a_push_that_died_between_packs_and_version_goes_on(
    store: LocalStore, tmp_path: Path
) -> None:
    url = url_in(tmp_path)
    push(copied(store, tmp_path / "copy"), f"{url}-whole")
    first = Failing(open_remote(url), Unavailable("away"), after=2)
    done = drain(store, first, tries=1, threads=1)
    assert (done.sent, done.waiting) == (2, 4)
    there_now = objects(tmp_path / "team")
    second = Failing(open_remote(url), Unavailable("away"), times=0)
    done = Pusher(store, url, remote=second).drain()
    assert (done.sent, done.known, done.waiting) == (4, 0, 0)
    assert objects(tmp_path / "team").keys() == objects(tmp_path / "team-whole").keys()
    assert there_now.items() <= objects(tmp_path / "team").items()


def test_it_tries_again_and_says_so(store: LocalStore, tmp_path: Path) -> None:
    remote = Failing(open_remote(url_in(tmp_path)), Unavailable("busy", after_s=0.2), times=2)
    told: list[Progress] = []
    done = drain(store, remote, report=told.append)
    assert (done.sent, done.waiting) == (6, 0)
    assert "busy" in {progress.why for progress in told if progress.waits_s > 0}
    assert told[-1].done == told[-1].total == 6
    assert told[-1].bytes == done.bytes
    assert {p.state for p in Outbox(store.outbox_path).all()} == {SENT}


def test_it_gives_up_and_keeps_what_waits(store: LocalStore, tmp_path: Path) -> None:
    url = url_in(tmp_path)
    done = drain(store, Failing(open_remote(url), Unavailable("away", after_s=0.01)), tries=3)
    assert (done.sent, done.waiting) == (0, 6)
    waiting = Outbox(store.outbox_path).all(url, (WAITING,))
    assert max(parcel.tries for parcel in waiting) == 3
    assert {parcel.error for parcel in waiting} <= {"away", ""}
    assert drain(store, open_remote(url)).sent == 6


def test_a_full_remote_is_said_at_once_and_all_waits(store: LocalStore, tmp_path: Path) -> None:
    url = url_in(tmp_path)
    with pytest.raises(DiskFull):
        drain(store, Failing(open_remote(url), DiskFull("full")))
    assert len(Outbox(store.outbox_path).all(url, (WAITING,))) == 6


def test_damage_here_costs_the_entries_that_need_it_only(store: LocalStore, tmp_path: Path) -> None:
    bad = store.metadata(store.resolve("net/first@good"))
    good = {d for r in records(store) if r.fqn == "second" for d in r.blobs}
    digest = next(digest for digest in bad.blobs if digest not in good)
    path = store.blob_path(digest)
    path.chmod(0o644)
    path.write_bytes(b"x" * path.stat().st_size)
    needing = {f"{r.name}@v{r.version}" for r in records(store) if digest in r.blobs}
    second = store.metadata(store.resolve("net/second@good"))
    store.state_path(store.metadata(store.resolve("net/second@good"))).write_bytes(b"x")
    store = LocalStore(store.root)  # what was verified before is not looked at again
    done = push(store, url_in(tmp_path))
    failed = {text.partition(":")[0] for text in done.failed}
    assert failed == needing | {f"net/second@v{second.version}"}
    assert done.sent == 6 - len(failed)
    assert done.waiting == 0
    assert all(
        "corrupted" in parcel.error for parcel in Outbox(store.outbox_path).all("", (FAILED,))
    )


def test_what_was_removed_or_cannot_be_named_there_fails_alone(
    store: LocalStore, tmp_path: Path
) -> None:
    from modulelens.errors import UsageError

    class Picky(Between):
        def put(self, draft: Draft, **how) -> Version:
            if draft.row.fqn == "first":
                raise UsageError("no such names here")
            return self.remote.put(draft, **how)

    remote = Picky(open_remote(url_in(tmp_path)))
    Outbox(store.outbox_path).ask(remote.url, records(store))
    store.remove(store.resolve("net/second@first"), force=True)
    done = Pusher(store, remote.url, remote=remote).drain()
    assert (done.sent, len(done.failed)) == (3, 3)
    errors = sorted(parcel.error for parcel in Outbox(store.outbox_path).all("", (FAILED,)))
    assert errors == ["it was removed here", "no such names here", "no such names here"]


# ---- repeated


def test_one_push_at_a_time_to_one_remote_sends_what_the_other_asked_for(
    store: LocalStore, tmp_path: Path
) -> None:
    entered, free = threading.Event(), threading.Event()

    class Slow(Between):
        def put(self, draft: Draft, **how) -> Version:
            entered.set()
            free.wait(30)
            return self.remote.put(draft, **how)

    url, first = url_in(tmp_path), records(store)[:1]
    Outbox(store.outbox_path).ask(url, first)
    pusher = Pusher(store, url, remote=Slow(open_remote(url)))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(pusher.drain)
        assert entered.wait(30)
        with pytest.raises(Conflict, match="sends these, too") as caught:
            push(store, url)
        assert "--status" in caught.value.hint
        assert push(store, f"{url}-other").sent == 6  # another remote is nobody's turn
        free.set()
        assert done.result().sent == 6
    assert push(store, url).known == 6


def test_what_is_asked_for_as_a_push_ends_is_sent(store: LocalStore, tmp_path: Path) -> None:
    url, (first, *rest) = url_in(tmp_path), records(store)
    outbox = Outbox(store.outbox_path)

    class Late(Pusher):
        """Others ask between its last look and its end."""

        def _empty(self) -> bool:
            going = super()._empty()
            if rest:
                outbox.ask(url, [rest.pop()])
            return going

    outbox.ask(url, [first])
    done = Late(store, url).drain()
    assert (done.sent, done.waiting) == (6, 0)


# ---- others were there meanwhile


def names_there(remote: Remote, fqn: str = "first") -> dict[int, tuple[set[str], set[str]]]:
    found = there(remote, {"fqn": fqn})
    return {v.version: (set(v.row.tags), set(v.row.aliases)) for v in found}


def test_what_others_moved_stays_and_what_is_new_here_goes(
    store: LocalStore, tmp_path: Path
) -> None:
    url = url_in(tmp_path)
    good = store.resolve("net/first@good")
    store.update(good, lambda m: msgspec.structs.replace(m, tags=("hot", "base")))
    push(store, url)
    remote = open_remote(url)
    one, two = (remote.get(FIRST, number) for number in "12")
    assert names_there(remote) == {1: (set(), {"first"}), 2: ({"hot", "base"}, {"good", "last"})}
    remote.alias(one, add=["good", "last"], remove=())
    remote.tag(two, add=["theirs"], remove=["hot"])
    moved = {1: (set(), {"first", "good", "last"}), 2: ({"base", "theirs"}, set())}
    assert push(store, url).known == 6
    assert names_there(remote) == moved
    # New names here go there; those of before do not come with them.
    store.alias(good, "best")
    store.update(good, lambda m: msgspec.structs.replace(m, tags=(*m.tags, "new")))
    push(store, url)
    assert names_there(remote) == moved | {2: ({"base", "theirs", "new"}, {"best"})}
    # Nor does a new version of the old capture take what the old one has no more.
    store.update(good, lambda m: msgspec.structs.replace(m, depth=77))
    assert push(store, url).sent == 1
    assert names_there(remote)[3] == ({"base", "new"}, {"best"})
    assert names_there(remote)[1] == moved[1]
    # An alias that is moved here moves there.
    store.alias(store.resolve("net/first@first"), "best")
    push(store, url)
    assert names_there(remote)[1][1] == {"first", "good", "last", "best"}


def test_who_did_not_send_it_takes_no_alias_from_others(store: LocalStore, tmp_path: Path) -> None:
    url = url_in(tmp_path)
    push(store, url)
    remote = open_remote(url)
    remote.alias(remote.get(FIRST, "1"), add=["good", "last"], remove=["first"])
    again = copied(store, tmp_path / "copy")  # without the outbox
    assert push(again, url).known == 6
    assert [aliases for _, aliases in names_there(remote).values()] == [
        {"good", "last", "first"},
        set(),
    ]


def test_an_alias_moves_also_where_the_push_was_killed_before_it_did(
    store: LocalStore, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    class Dies(Between):
        """Puts a version, and dies before its aliases."""

        def put(self, draft: Draft, **how) -> Version:
            self.remote.put(
                msgspec.structs.replace(draft, row=msgspec.structs.replace(draft.row, aliases=()))
            )
            raise Killed

    url = url_in(tmp_path)
    push(store, url)
    (new,) = store.put_entries([(record_with("net", "first"), {})], aliases=["good"])
    with pytest.raises(Killed):
        drain(store, Dies(open_remote(url)))
    remote = open_remote(url)
    assert remote.get(FIRST, "good").version == 2
    push(store, url)
    assert remote.get(FIRST, "good").version == 3
    assert new.version == 3


def test_what_was_removed_there_is_not_sent_again(store: LocalStore, tmp_path: Path) -> None:
    url = url_in(tmp_path)
    push(store, url)
    remote = open_remote(url)
    remote.delete(remote.get(FIRST, "2"), force=True)
    for _ in range(2):
        done = push(store, url)
        assert (done.sent, done.known, done.removed, done.waiting) == (0, 5, 1, 0)
    store.update(store.resolve("net/first@good"), lambda m: msgspec.structs.replace(m, depth=77))
    assert push(store, url).removed == 1  # it is the same capture
    assert set(names_there(remote)) == {1}
    assert push(store, url, again=True).sent == 6
    assert set(names_there(remote)) == {1, 3}
    assert push(store, url).known == 6
    # A remote that was made anew has removed nothing.
    shutil.rmtree(tmp_path / "team")
    assert push(store, url).sent == 6


def test_damage_there_is_mended_by_sending_it_again(store: LocalStore, tmp_path: Path) -> None:
    url = url_in(tmp_path)
    push(store, url)
    whole = objects(tmp_path / "team")
    for path in (tmp_path / "team").rglob("*"):
        if path.is_file() and path.relative_to(tmp_path / "team").parts[0] in ("packs", "files"):
            path.chmod(0o600)
            path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(Corrupted):
        pulled(open_remote(url), tmp_path / "bad")
    assert push(store, url).known == 6
    with pytest.raises(Corrupted):
        pulled(open_remote(url), tmp_path / "bad")
    assert push(store, url, again=True).sent == 6
    assert objects(tmp_path / "team") == whole
    assert contents(pulled(open_remote(url), tmp_path / "back")) == contents(store)


def test_packs_are_mended_where_only_some_of_a_capture_are_sent_again(
    store: LocalStore, tmp_path: Path
) -> None:
    url = url_in(tmp_path)
    push(store, url)
    packs = [p for p in (tmp_path / "team/packs").rglob("*") if p.is_file()]
    outbox, all_of_it = Outbox(store.outbox_path), records(store)
    for one in all_of_it:  # whichever of a capture comes first in the outbox
        for pack in packs:
            pack.chmod(0o600)
            pack.write_bytes(b"x" * pack.stat().st_size)
        outbox.ask(url, [record for record in all_of_it if record.id != one.id])
        outbox.ask(url, [one], again=True)
        assert Pusher(store, url).drain().failed == ()
        back = LocalStore(tmp_path / one.trace_id / f"of {one.fqn}")
        pull(back, open_remote(url), [open_remote(url).get(one.collection, str(one.version))])
        assert contents(back).items() <= contents(store).items()


def test_a_late_change_of_an_old_capture_does_not_make_it_the_newest(
    store: LocalStore, tmp_path: Path
) -> None:
    url, first = url_in(tmp_path), store.resolve("net/first@first")
    store.update(first, lambda m: msgspec.structs.replace(m, created="2020-01-01T00:00:00+00:00"))
    push(store, url)
    newest = open_remote(url).get(FIRST).identity
    old = store.update(first, lambda m: msgspec.structs.replace(m, depth=77))
    assert push(store, url).sent == 1
    assert open_remote(url).get(FIRST).identity == newest
    assert open_remote(url).get(FIRST, "3").identity == digest_of(record_of(old))


def test_what_cannot_be_sent_waits_and_says_why(store: LocalStore, tmp_path: Path) -> None:
    url = url_in(tmp_path)
    denied = Failing(open_remote(url), PermissionDenied("no role here"))
    with pytest.raises(PermissionDenied):
        drain(store, denied)
    waiting = Outbox(store.outbox_path).all(url, (WAITING,))
    assert {parcel.error for parcel in waiting} == {"no role here"}
    assert [parcel.tries for parcel in waiting] == [0] * len(waiting)


def test_an_outbox_of_before_is_read(store: LocalStore, tmp_path: Path) -> None:
    (first, *_), url = records(store), url_in(tmp_path)
    with sqlite3.connect(store.outbox_path) as db:
        db.execute(
            "CREATE TABLE outbox (remote TEXT NOT NULL, entry TEXT NOT NULL, capture TEXT NOT NULL,"
            " made TEXT NOT NULL, state TEXT NOT NULL, identity TEXT NOT NULL DEFAULT '', tries"
            " INTEGER NOT NULL DEFAULT 0, due REAL NOT NULL DEFAULT 0, version INTEGER NOT NULL"
            " DEFAULT 0, error TEXT NOT NULL DEFAULT '', asks INTEGER NOT NULL DEFAULT 1,"
            " PRIMARY KEY (remote, entry)) WITHOUT ROWID"
        )
        row = (url, first.id, first.trace_id, first.created)
        db.execute(
            "INSERT INTO outbox (remote, entry, capture, made, state) VALUES (?,?,?,?,'waiting')",
            row,
        )
    db.close()
    assert send(store, url).sent == 1


def test_two_processes_push_one_repo_and_two_others_the_same_modules(
    store: LocalStore, tmp_path: Path
) -> None:
    url = url_in(tmp_path)
    others = [store, store, copied(store, tmp_path / "b"), copied(store, tmp_path / "c")]

    def work(mine: LocalStore):
        return lambda send: send(push(LocalStore(mine.root), url, wait_s=60).sent)

    children = [Child(work(mine)) for mine in others]
    ends = [child.wait() for child in children]
    assert [status for status, _ in ends] == [0] * 4
    assert sum(int(lines[0]) for _, lines in ends) >= 6
    found = there(open_remote(url))
    assert sorted({v.version for v in found if v.row.fqn == "first"}) == [1, 2]
    assert len(found) == 6
    assert contents(pulled(open_remote(url), tmp_path / "back")) == contents(store)


def test_numbers_follow_the_order_of_captures(store: LocalStore, tmp_path: Path) -> None:
    for number in range(6):
        record = record_with("net", "first", trace_id="zma"[number // 2], depth=number)
        put_entry(store, msgspec.structs.replace(record, created=f"2027-01-0{number + 1}"), {})
    push(store, url_in(tmp_path))
    found = {v.version: v.row.depth for v in there(open_remote(url_in(tmp_path)), {"fqn": "first"})}
    assert [found[number] for number in range(3, 9)] == list(range(6))


def test_counts_are_exact_from_many_threads(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "many")
    for number in range(60):
        add_sample(store, "net", f"layer{number}", blobs=(b"%d" % number,))
    told: list[bool] = []

    def tell(_: Progress) -> None:
        told.append(False)
        time.sleep(0)  # another thread's turn
        assert told[-1] is False, "two at once"
        told[-1] = True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        done = push(store, f"memory://{tmp_path.name}", report=tell)
    finally:
        sys.setswitchinterval(interval)
    own = [(len(record), len(state)) for record, state, _ in contents(store).values()]
    blobs = {digest: size for record in records(store) for digest, size in record.blobs.items()}
    assert done == Pushed(sent=60, bytes=sum(map(sum, own)) + sum(blobs.values()))
    assert all(told)


def test_nothing_stays_in_the_spool(store: LocalStore, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    push(store, url_in(tmp_path))
    pulled(open_remote(url_in(tmp_path)), tmp_path / "back")
    failing = Failing(open_remote(url_in(tmp_path) + "2"), RuntimeError("a bug"))
    with pytest.raises(RuntimeError):
        drain(store, failing)
    assert not any((tmp_path / "spool").iterdir())
    for name, age_s in (("modulelens-spool-old", 90_000), ("modulelens-spool-new", 9)):
        (tmp_path / "spool" / name).mkdir()
        (tmp_path / "spool" / name / "pack").write_bytes(b"x")
        os.utime(tmp_path / "spool" / name, (time.time() - age_s,) * 2)
    sweep()
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["modulelens-spool-new"]


def test_draft_of_no_tensors(tmp_path: Path) -> None:
    remote = open_remote(url_in(tmp_path))
    assert numbered([remote.put(draft(tmp_path))]) == numbered(there(remote))
