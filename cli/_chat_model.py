"""What a chat talks with: a model in this process, or one of a server."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgellm.cli import _model
from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.remote import RemoteModel
    from edgellm.talk import Seen, Talk


class ChatModel(Protocol):
    """``name`` brings it back (see Source). ``n_ctx``: tokens, 0 where it is not known."""

    name: str
    n_ctx: int

    def title(self) -> str: ...

    def facts(self) -> list[tuple[str, str]]:
        """For /show info."""

    def identity(self, talk: Any) -> dict[str, Any]:
        """What must be the same for token ids to mean the same."""

    def licence(self) -> str: ...

    def template(self, talk: Any) -> str: ...

    def talk(self, system: str | None, variables: dict[str, Any]) -> "Talk": ...

    def save_cache(self, path: Path, seen: "Seen") -> None: ...

    def load_cache(self, path: Path) -> None: ...

    def dropped(self) -> str:
        """Under the policy ring, a sentence about what the last answer no longer saw, or ""."""

    def close(self) -> None: ...


class Source(Protocol):
    """Where a chat's models come from."""

    def check(self, name: str) -> None:
        """Raises what most often keeps ``load`` from loading it."""

    def load(self, name: str | None) -> ChatModel: ...


class LocalModel:
    """``wanted``: the chat template's name or file, else the model's own."""

    def __init__(self, llm: "LLM", path: Path, wanted: str | None) -> None:
        self.llm, self.path, self.name, self.n_ctx = llm, path, str(path), llm.n_ctx
        self._wanted = wanted

    def title(self) -> str:
        from edgellm.hub import catalogue

        titles = (entry.title for entry in catalogue()[1].values() if entry.file == self.path.name)
        name = next(titles, None) or self.llm.metadata.get("general.name") or self.path.stem
        return f"{name}, {self.n_ctx:,} tokens of context"

    def facts(self) -> list[tuple[str, str]]:
        metadata = self.llm.metadata
        keys = ("general.architecture", "general.size_label", "general.license")
        rows = [("file", str(self.path))]
        rows += [(k.rpartition(".")[2], str(metadata[k])) for k in keys if k in metadata]
        if self.llm.speculation is not None:
            rows.append(("speculation", self.llm.metrics.speculation.report()))
        return rows

    def identity(self, talk: Any) -> dict[str, Any]:
        from edgellm.template_source import checksum

        found = {"file": self.path.name, "bytes": self.path.stat().st_size,
                 "template": checksum(talk.template.source)}  # fmt: skip
        adapters = [str(adapter) for adapter in self.llm.adapters]
        return {**found, "lora": adapters} if adapters else found

    def licence(self) -> str:
        names = ("general.license", "general.license.name", "general.license.link")
        found = [str(self.llm.metadata[name]) for name in names if name in self.llm.metadata]
        return "\n".join(found) or "The file does not name its licence."

    def template(self, talk: Any) -> str:
        return str(talk.template.source)

    def talk(self, system: str | None, variables: dict[str, Any]) -> "Talk":
        from edgellm.conversation import Conversation, template_of

        return Conversation(self.llm, template_of(self.llm, self._wanted), system, variables)

    def save_cache(self, path: Path, seen: "Seen") -> None:
        self.llm.save_cache(path, seen.tokens)

    def load_cache(self, path: Path) -> None:
        self.llm.load_cache(path)

    def dropped(self) -> str:
        from edgellm.cli._engine import what_was_dropped

        return what_was_dropped(self.llm)

    def close(self) -> None:
        self.llm.close()


class ServerModel:
    """The server keeps template, licence and cache to itself."""

    def __init__(self, model: "RemoteModel") -> None:
        self.model, self.name, self.n_ctx = model, model.name, model.n_ctx

    def title(self) -> str:
        room = f", {self.n_ctx:,} tokens of context" if self.n_ctx else ""
        return f"{self.model.name} at {self.model.url}{room}"

    def facts(self) -> list[tuple[str, str]]:
        return [("models", ", ".join(self.model.names))]

    def identity(self, talk: Any) -> dict[str, Any]:
        return {"server": self.model.url, "name": self.model.name}

    def licence(self) -> str:
        raise EdgeLLMError("The server does not tell the model's licence.")

    def template(self, talk: Any) -> str:
        raise EdgeLLMError("The template is the server's.")

    def talk(self, system: str | None, variables: dict[str, Any]) -> "Talk":
        from edgellm.remote import RemoteTalk

        return RemoteTalk(self.model, system, variables)

    def save_cache(self, path: Path, seen: "Seen") -> None:
        """What the server computed stays with it."""

    def load_cache(self, path: Path) -> None:
        """What this process computed of an earlier talk is of no use there."""

    def dropped(self) -> str:
        return ""

    def close(self) -> None:
        self.model.close()


class Files:
    """Models in this process; ``load`` makes one of a path."""

    def __init__(self, load: Callable[[Path], "LLM"], template: str | None) -> None:
        self._load, self._template = load, template

    def check(self, name: str) -> None:
        _model.locate(name)

    def load(self, name: str | None) -> LocalModel:
        path = _model.locate(name)
        return LocalModel(self._load(path), path, self._template)


class Served:
    """Models of a server."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    def check(self, name: str) -> None:
        self.load(name).close()

    def load(self, name: str | None) -> ServerModel:
        from edgellm.remote import RemoteModel

        return ServerModel(RemoteModel(self._url, name, self._key))
