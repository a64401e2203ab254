"""Models of a URL."""

import pytest

from edgellm import hub
from edgellm.hub import HubError, shelf

from .fake import Fault, blob


def test_a_url_is_fetched_once_and_removed(server, cache):
    data = server.files["/a b/m.gguf"] = blob()
    url = f"{server.url}/a%20b/m.gguf?key=1"
    seen = []
    path = hub.resolve(url, lambda item, done: seen.append((item.title, item.size, done)))
    assert path.read_bytes() == data and seen[-1] == ("m.gguf", len(data), len(data))
    assert hub.resolve(url) == hub.pull(url) == hub.find(url) == path and len(server.log) == 1
    assert [(m.name, m.where) for m in shelf.fetched()] == [(url, "url")]
    assert shelf.removable(url) == ([path], len(data))
    shelf.remove(url)
    assert hub.find(url) is None and shelf.fetched() == [] and not (cache / "models/url").exists()


def test_two_urls_of_one_name(server, cache):
    one = server.files["/1/m.gguf"] = blob()
    two = server.files["/2/m.gguf"] = blob()
    assert hub.resolve(f"{server.url}/1/m.gguf").read_bytes() == one
    assert hub.resolve(f"{server.url}/2/m.gguf").read_bytes() == two


def test_a_split_file(server, cache):
    for number in (1, 2, 3):
        server.files[f"/m-{number:05}-of-00003.gguf"] = blob(1000 * number)
    path = hub.resolve(f"{server.url}/m-00002-of-00003.gguf")
    assert path.name == "m-00001-of-00003.gguf"
    assert sorted(p.stat().st_size for p in path.parent.iterdir()) == [1000, 2000, 3000]
    assert hub.find(f"{server.url}/m-00001-of-00003.gguf") == path


def test_rm_takes_what_a_cut_fetch_left(server, cache):
    server.files["/m.gguf"] = blob()
    url = f"{server.url}/m.gguf"
    hub.resolve(url)
    shelf.fetched()[0].path.unlink()
    server.fault("/m.gguf", Fault("cut", 1000), Fault("status", status=404))
    with pytest.raises(HubError):
        hub.resolve(url)
    assert len(list(cache.glob("models/url/*/m.gguf.partial*"))) == 2
    shelf.remove(url)
    assert not list(cache.glob("models/url/*"))
