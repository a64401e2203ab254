"""edgellm warmup: compiles by loading, and says what it did."""

from edgellm.cli.main import run


def test_says_how_many_kernels(fake, capsys):
    assert run(["warmup", "m.gguf", "-t", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "2 kernels compiled, 5 loaded from the store in 1.25 s.\n"
    assert "compiling kernels 1/2" in err
    assert fake.SEEN["n_threads"] == 1 and fake.SEEN["closed"]


def test_the_model_may_come_from_the_environment(fake, monkeypatch):
    monkeypatch.setenv("EDGELLM_MODEL", "m.gguf")
    assert run(["warmup"]) == 0
    assert fake.SEEN["path"] == "m.gguf"
