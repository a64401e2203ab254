"""What a name means, and that no name, digest or file list leads out of its folder."""

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgellm import hub
from edgellm.hub import names, store
from edgellm.hub.names import (
    Held,
    Repo,
    Short,
    Url,
    choose,
    models_among,
    parse,
    parts_of,
    quant_of,
)
from edgellm.hub.store import HubError

REPO = "Qwen/Qwen2.5-0.5B-Instruct-GGUF"


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("smollm2", Short("smollm2")),
        (REPO, Repo(REPO)),
        (f"{REPO}:q8_0", Repo(REPO, "q8_0")),
        (f"hf.co/{REPO}:Q8_0", Repo(REPO, "Q8_0")),
        (f"huggingface.co/{REPO}", Repo(REPO)),
        (f"https://huggingface.co/{REPO}", Repo(REPO)),
        (f"https://huggingface.co/{REPO}/tree/main", Repo(REPO)),
        (f"https://huggingface.co/{REPO}/blob/main/a/b.gguf", Repo(REPO, file="a/b.gguf")),
        (f"https://hf.co/{REPO}/resolve/main/b.gguf?download=true", Repo(REPO, file="b.gguf")),
        (f"hf.co/{REPO}/b.gguf", Repo(REPO, file="b.gguf")),
        ("https://a.b/c/m.gguf?x=1", Url("https://a.b/c/m.gguf?x=1", "m.gguf")),
        ("https://a.b/c/m%20n.gguf", Url("https://a.b/c/m%20n.gguf", "m n.gguf")),
        ("http://localhost:80/m.gguf", Url("http://localhost:80/m.gguf", "m.gguf")),
        ("ollama:llama3.2:1b", Held("ollama", "llama3.2:1b")),
        ("lmstudio:a/b/c.gguf", Held("lmstudio", "a/b/c.gguf")),
    ],
)
def test_parse(text, means):
    assert parse(text) == means


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope", "neither a file nor a model of the catalogue .*smollm2.*user/repo:QUANT"),
        ("models/x.gguf", "'models/x.gguf' is neither a file nor .* check the path"),
        ("./x", "check the path"),
        ("http://example.com/m.gguf", "https"),
        ("ftp://example.com/m.gguf", "https"),
        ("file:///etc/passwd", "not a URL"),
        ("https://example.com/", "download it yourself"),
        ("https://example.com/..%2f..%2fm.gguf", "download it yourself"),
        ("https://me:pw@example.com/m.gguf", "user name or password"),
        ("https://[/m.gguf", "not a URL"),
        ("https://a:x/m.gguf", "not a URL"),
        ("https://a b/m.gguf", "percent-encode"),
        ("hf.co/only", "hf.co/user/repo:QUANT"),
        ("hf.co/../x", "hf.co/user/repo"),
        ("https://huggingface.co/a/b/resolve/v1/m.gguf/../x", "hf.co/user/repo"),
        ("a--b/c", "neither"),
        ("a/..", "neither"),
        ("", "neither"),
        ("a\0b", "zero byte"),
        ("~\0", "zero byte"),
    ],
)
def test_refused(text, says):
    with pytest.raises(HubError, match=says) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_files_win_and_folders_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("smollm2").write_bytes(b"")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert parse("smollm2") == Path("smollm2")
    assert parse(None) == Short(hub.catalogue()[0])
    with pytest.raises(HubError, match="is a folder"):
        parse("a/b")
    assert parse("hf.co/a/b") == Repo("a/b")


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Llama-3.2-1B-Instruct-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("BF16/m-00001-of-00002.gguf", "BF16"),
        ("gemma-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-IQ2_XXS.gguf", "IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("qwen.gguf", None),
    ],
)
def test_quant_of(file, quant):
    assert quant_of(file) == quant


FILES = [
    "README.md",
    "m-BF16-00001-of-00002.gguf",
    "m-BF16-00002-of-00002.gguf",
    "m-Q3_K_S.gguf",
    "m-Q4_K_M.gguf",
    "m-UD-Q5_K_XL.gguf",
    "mmproj-m-f16.gguf",
    "broken-Q6_K-00001-of-00003.gguf",
]


def test_choose():
    assert choose(Repo("a/b"), FILES) == ["m-Q4_K_M.gguf"]
    assert choose(Repo("a/b", "q3_k_s"), FILES) == ["m-Q3_K_S.gguf"]
    assert choose(Repo("a/b", "q5_k_xl"), FILES) == ["m-UD-Q5_K_XL.gguf"]
    assert choose(Repo("a/b", "m-q3_k_s.gguf"), FILES) == ["m-Q3_K_S.gguf"]
    assert choose(Repo("a/b", "bf16"), FILES) == FILES[1:3]
    assert choose(Repo("a/b", file=FILES[2]), FILES) == FILES[1:3]
    assert choose(Repo("a/b"), ["m-Q8_0.gguf", "m-Q2_K.gguf"]) == ["m-Q2_K.gguf"]
    with pytest.raises(HubError, match="has no Q9; it has BF16, Q3_K_S, Q4_K_M, Q6_K"):
        choose(Repo("a/b", "Q9"), FILES)
    with pytest.raises(HubError, match="lacks broken-Q6_K-00002-of-00003.gguf"):
        choose(Repo("a/b", "Q6_K"), FILES)
    with pytest.raises(HubError, match="holds no GGUF file"):
        choose(Repo("a/b"), ["model.safetensors", "mmproj-f16.gguf"])


PIECES = st.sampled_from(["..", ".", "/", "\\", "a", "C:", "\0", "~", "con", "-", ":", "%2e", "é"])
PATHS = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=8).map("".join))


@settings(deadline=None)
@given(PATHS)
@example("../../etc/passwd")
@example("a/../../b")
@example("/etc/passwd")
@example("C:/x")
@example("a\\..\\b")
@example("\ud800")
def test_nothing_leads_out_of_its_folder(relative):
    root = Path("/root/of/it")
    try:
        path = store.inside(root, relative)
    except HubError:
        return
    assert os.path.abspath(path) == str(path) and str(path).startswith(f"{root}{os.sep}")
    assert path.relative_to(root).as_posix() == relative


@settings(deadline=None)
@given(PATHS)
def test_no_name_of_a_repository_leads_out(text):
    for form in (text, f"hf.co/{text}", f"https://huggingface.co/{text}", f"https://x.y/{text}"):
        try:
            name = parse(form)
        except HubError:
            continue
        if isinstance(name, Repo):
            store.inside(Path("/x"), "models--" + name.repo.replace("/", "--"))
            assert name.repo.count("/") == 1 and ".." not in name.repo
        elif isinstance(name, Url):
            assert store.safe_part(name.file)


@settings(deadline=None)
@given(st.one_of(st.text(max_size=80), st.from_regex(r"sha256[:-][0-9a-f]{62,66}", fullmatch=True)))
@example("sha256:" + "../" * 21 + "a")
@example("sha256:" + "a" * 64 + "\n")
def test_digests_are_64_hex_digits_or_none(text):
    digest = store.sha256_digest(text)
    assert digest is None or (len(digest) == 64 and set(digest) <= set("0123456789abcdef"))


@settings(deadline=None)
@given(st.lists(PATHS | PATHS.map(lambda text: f"{text}.gguf"), max_size=6), st.booleans())
def test_any_list_of_files_is_chosen_from_or_refused(files, named):
    try:
        parts = choose(Repo("a/b", "Q4_K_M" if named else None), files)
    except HubError:
        return
    assert parts and set(parts) <= set(files) and parts[0] in models_among(files)


def test_split_numbers_are_bounded():
    assert len(parts_of("m-00001-of-01024.gguf")) == 1024
    assert parts_of("m-00001-of-99999.gguf") == ["m-00001-of-99999.gguf"]
    assert parts_of("m-00000-of-00002.gguf") == ["m-00000-of-00002.gguf"]


def test_origin():
    assert names.origin("https://A.b/x") == names.origin("https://a.b:443/y")
    assert names.origin("https://a.b/") != names.origin("http://a.b/")
    assert names.origin("http://a.b/") != names.origin("http://a.b:81/")


def test_the_catalogue_can_be_fetched():
    default, entries = hub.catalogue()
    assert default in entries
    for entry in entries.values():
        assert entry.licence and entry.title and entry.sources
        for source in entry.sources:
            if source["kind"] == "hf":
                assert names.valid_repo(source["repo"]) and quant_of(f"x-{source['quant']}.gguf")
            else:
                assert entry.file and entry.size and len(entry.sha256) == 64


def test_cache_dir(monkeypatch):
    monkeypatch.setenv("EDGELLM_CACHE", "~/mine")
    assert hub.cache_dir() == Path.home() / "mine"
    monkeypatch.delenv("EDGELLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub.cache_dir() == Path("/xdg/edgellm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_dir() == Path.home() / ".cache" / "edgellm"
