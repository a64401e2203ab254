"""A file's tensors, checked against the exact shapes its architecture derives."""

from __future__ import annotations

from edgellm.kernels.graph import Weight
from edgellm.quant.gguf import GGUF, GGUFError


class ModelError(GGUFError):
    """The file is sound but is not a model this architecture can run."""


class Weights:
    """Tensors by name, without the suffix ".weight"."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf = gguf
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self.gguf.tensors

    def __call__(self, name: str, *shape: int, suffix: str = "weight") -> Weight:
        """The tensor ``name.weight`` of ``shape`` in GGUF order; ModelError when it is missing or
        has another shape. Dimensions of 1 at the end need not be written."""
        full = f"{name}.{suffix}" if suffix else name
        info = self.gguf.tensors.get(full)
        if info is None:
            raise ModelError(
                self.gguf.path, 0, f"tensor {full}",
                "is missing: the file is incomplete or of another architecture",
            )  # fmt: skip
        if _trimmed(info.shape) != _trimmed(shape):
            raise ModelError(
                self.gguf.path, 0, f"tensor {full}",
                f"has shape {list(info.shape)}; its hyper-parameters ask for {list(shape)}",
            )  # fmt: skip
        self.used.add(full)
        return Weight(full, info.type, shape)

    def vector(self, name: str, *shape: int, suffix: str = "weight") -> Weight:
        """A small tensor that kernels read as it is: it has to be F32."""
        weight = self(name, *shape, suffix=suffix)
        if weight.type.name != "f32":
            raise ModelError(
                self.gguf.path, 0, f"tensor {weight.name}", f"must be F32, not {weight.type}"
            )
        return weight

    def optional(self, name: str, *shape: int, suffix: str = "weight") -> Weight | None:
        """A small tensor that the file may leave out."""
        present = f"{name}.{suffix}" in self.gguf.tensors
        return self.vector(name, *shape, suffix=suffix) if present else None

    @property
    def unused(self) -> list[str]:
        """Tensors of the file that the graph does not read."""
        return [name for name in self.gguf.tensors if name not in self.used]


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
