"""The download against a server that stalls, cuts, lies, redirects and refuses."""

import json
import random
import threading

import pytest

from edgellm.hub import remote, transport
from edgellm.hub.remote import Wanted
from edgellm.hub.store import HubError

from .fake import Fault, blob, sha256

PATH = "/files/m.gguf"


@pytest.fixture
def data(server) -> bytes:
    server.files[PATH] = blob()
    return server.files[PATH]


@pytest.fixture
def target(cache):
    return cache / "models" / "m.gguf"


def get(server, target, data=None, **more):
    known = {"size": len(data), "sha256": sha256(data)} if data is not None else {}
    remote.fetch(Wanted(server.url + PATH, "m.gguf", **{**known, **more}), target)


def ranges(server) -> list[str | None]:
    return [headers.get("range") for headers in server.requests(PATH)]


def alone(target) -> bool:
    return [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_file_is_fetched_once_and_reported(server, data, target):
    seen = []
    wanted = Wanted(server.url + PATH, "m.gguf")
    remote.fetch(wanted, target, lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == data and alone(target)
    assert seen == sorted(seen) and seen[-1] == (len(data), len(data))
    remote.fetch(wanted, target)
    assert ranges(server) == [None]


@pytest.mark.parametrize("known", [True, False])
def test_cuts_and_stalls_are_continued(server, data, target, known):
    server.fault(PATH, Fault("cut", 100_000), Fault("stall", 70_000), Fault("cut", 0))
    get(server, target, data if known else None)
    assert target.read_bytes() == data and alone(target)
    assert ranges(server) == [None, "bytes=100000-", "bytes=170000-", "bytes=170000-"]
    validators = {headers.get("if-range") for headers in server.requests(PATH)[1:]}
    assert validators == {None if known else f'"{sha256(data)[:20]}"'}


@pytest.mark.parametrize("seed", range(8))
def test_cuts_at_random_places(server, data, target, seed):
    rng = random.Random(seed)
    kinds = ["cut", "cut", "plain", "shifted", "status"]
    faults = [Fault(rng.choice(kinds), rng.randrange(1, 150_000), 503) for _ in range(6)]
    server.fault(PATH, *(f for f in faults if f.kind != "shifted" or rng.random() < 0.5))
    get(server, target, data if seed % 2 else None)
    assert target.read_bytes() == data and alone(target)


def test_what_a_killed_fetch_left_is_continued(server, data, target):
    server.fault(PATH, *[Fault("cut", 0) for _ in range(10)])
    server.faults[PATH].appendleft(Fault("cut", 90_000))
    with pytest.raises(transport.NetworkError, match="4 times in a row.*goes on where"):
        get(server, target)
    assert target.with_name("m.gguf.partial").stat().st_size == 90_000
    server.faults.clear()
    get(server, target)
    assert target.read_bytes() == data and ranges(server)[-1] == "bytes=90000-"


def test_a_changed_file_is_fetched_anew(server, data, target):
    server.fault(PATH, Fault("cut", 90_000), Fault("status", status=404))
    with pytest.raises(HubError, match="not there .HTTP 404"):
        get(server, target)
    server.files[PATH] = blob()
    get(server, target)
    assert target.read_bytes() == server.files[PATH]
    assert server.log[-1][3] == 200


@pytest.mark.parametrize("left", [b"", b"{", b"[1]", b'{"url": 3}', None])
def test_a_partial_file_of_unknown_origin_is_not_continued(server, data, target, left):
    target.parent.mkdir(parents=True)
    target.with_name("m.gguf.partial").write_bytes(b"GGUFxxxxxxxx")
    if left is not None:
        target.with_name("m.gguf.partial.json").write_bytes(left)
    get(server, target)
    assert target.read_bytes() == data and ranges(server) == [None] and alone(target)


def test_killed_between_the_last_byte_and_the_rename(server, data, target):
    target.parent.mkdir(parents=True)
    target.with_name("m.gguf.partial").write_bytes(data)
    state = {"url": server.url + PATH, "etag": '"x"', "total": len(data)}
    target.with_name("m.gguf.partial.json").write_text(json.dumps(state))
    get(server, target)
    assert target.read_bytes() == data and alone(target) and not server.log


def test_without_etag_and_checksum_a_cut_means_starting_again(server, data, target):
    server.etags = False
    server.fault(PATH, Fault("cut", 90_000), Fault("status", status=404))
    with pytest.raises(HubError):
        get(server, target)
    get(server, target)
    assert target.read_bytes() == data and ranges(server)[-1] is None


@pytest.mark.parametrize("etags", [True, False])
def test_a_server_that_always_cuts_comes_to_an_end(server, data, target, etags):
    server.etags = etags
    cuts = [0, 10_000] if etags else [100_000, 70_000, 120_000]
    server.fault(PATH, *[Fault("cut", cuts[n % len(cuts)]) for n in range(90)])
    with pytest.raises(transport.NetworkError, match="in a row"):
        get(server, target)
    assert len(server.log) < 60


def test_a_wrong_partial_file_is_found_by_the_checksum(server, data, target):
    target.parent.mkdir(parents=True)
    target.with_name("m.gguf.partial").write_bytes(blob(1000))
    get(server, target, data)
    assert target.read_bytes() == data and ranges(server) == ["bytes=1000-", None]


def test_a_wrong_checksum_is_refused(server, data, target):
    server.files[PATH] = blob(len(data))
    with pytest.raises(HubError, match="another checksum"):
        get(server, target, data)
    assert list(target.parent.iterdir()) == []


def test_lies_about_the_size(server, data, target):
    with pytest.raises(HubError, match="offers 300000 bytes instead of 299999"):
        get(server, target, data, size=len(data) - 1)
    server.fault(PATH, *[Fault("claim", 5_000) for _ in range(8)])
    with pytest.raises(HubError, match="offers 305000"):
        get(server, target, data)
    server.fault(PATH, *[Fault("claim", 5_000) for _ in range(8)])
    with pytest.raises(HubError, match="300000 of 305000 bytes|keeps changing"):
        get(server, target)
    assert not target.exists()


def test_a_body_of_unknown_length(server, data, target):
    server.fault(PATH, Fault("endless"), Fault("chunked"))
    for _ in range(2):
        with pytest.raises(HubError, match="does not tell the size"):
            get(server, target)
    server.fault(PATH, Fault("chunked"))
    get(server, target, data)
    assert target.read_bytes() == data


def test_more_than_announced_is_refused(server, data, target):
    server.fault(PATH, Fault("chunked"))
    with pytest.raises(HubError, match="sends more than the 1000 bytes"):
        get(server, target, size=1000)
    assert list(target.parent.iterdir()) == []


def test_other_content_is_named_at_once(server, data, target):
    server.fault(PATH, Fault("other", data=b"<!doctype html>" + bytes(10**6)), Fault("gzip"))
    with pytest.raises(HubError, match="not a GGUF file.*<!doctyp"):
        get(server, target)
    with pytest.raises(HubError, match="compressed"):
        get(server, target)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (400, "HTTP 400"),
        (401, "refused .HTTP 401., it needs a login; .*HF_TOKEN"),
        (403, "HF_TOKEN"),
        (404, "HTTP 404"),
        (416, "HTTP 416"),
    ],
)
def test_refusals_are_not_tried_again(server, data, target, status, says):
    server.fault(PATH, Fault("status", status=status))
    with pytest.raises(HubError, match=says) as caught:
        get(server, target)
    assert "\n" not in str(caught.value) and len(server.log) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_passing_failures_are_tried_again(server, data, target, status):
    retry = Fault("status", status=status, headers={"Retry-After": "0.01"})
    server.fault(PATH, retry, Fault("status", status=status))
    get(server, target)
    assert target.read_bytes() == data


def test_a_range_that_is_refused_starts_again(server, data, target):
    server.fault(PATH, Fault("cut", 90_000), Fault("status", status=416))
    get(server, target)
    assert target.read_bytes() == data
    assert ranges(server) == [None, "bytes=90000-", None]


def test_a_redirect_gets_no_credentials(server, other, data, target):
    other.files[PATH] = data
    secret = {"Authorization": "Bearer hf_secret"}
    server.fault(PATH, *[Fault("redirect", url=other.url + PATH) for _ in range(3)])
    other.fault(PATH, Fault("cut", 70_000))
    get(server, target, data, headers=secret)
    assert target.read_bytes() == data
    assert {h.get("authorization") for h in server.requests(PATH)} == {"Bearer hf_secret"}
    assert [h.get("authorization") for h in other.requests(PATH)] == [None, None]
    assert "hf_secret" not in repr(other.log)


def test_a_redirect_back_and_one_within_the_host(server, other, data, target):
    server.files["/moved.gguf"] = data
    server.fault(PATH, Fault("redirect", url="/moved.gguf", status=307))
    get(server, target, data, headers={"Authorization": "x"})
    assert server.requests("/moved.gguf")[0]["authorization"] == "x"


@pytest.mark.parametrize(
    "place",
    [
        "http://example.com/m.gguf",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http://[",
        "http://a b/",
    ],
)
def test_redirects_elsewhere_are_refused(server, data, target, place):
    server.fault(PATH, Fault("redirect", url=place))
    with pytest.raises(HubError, match="refused|no URL"):
        get(server, target)


def test_a_downgrade_is_refused():
    with pytest.raises(HubError, match="from https to"):
        transport._follow("https://a/x", "http://localhost/x", "m")


def test_endless_redirects_end(server, data, target):
    server.fault(PATH, *[Fault("redirect", url=PATH) for _ in range(50)])
    with pytest.raises(HubError, match="more than 10 redirects"):
        get(server, target)


def test_no_server(cache, target):
    with pytest.raises(transport.NetworkError, match="Connection refused.*check the network"):
        remote.fetch(Wanted("http://127.0.0.1:9/m.gguf", "m.gguf"), target)


def test_a_full_disk_is_seen_before(server, data, target, monkeypatch):
    from edgellm.hub import store

    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: type("U", (), {"free": 1000})())
    with pytest.raises(HubError, match="MB free; EDGELLM_CACHE"):
        get(server, target)


def test_a_folder_that_cannot_be_written(server, data, cache):
    cache.write_text("a file")
    with pytest.raises(HubError, match="could not be stored in .*EDGELLM_CACHE"):
        get(server, cache / "models" / "m.gguf")


def test_two_at_once_fetch_once(server, data, target):
    server.pace = 0.02
    threads = [threading.Thread(target=get, args=(server, target)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.log) == 1 and target.read_bytes() == data
