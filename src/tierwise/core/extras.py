"""Which import belongs to which pip extra, and the one sentence said when it is missing.

The table mirrors `[project.optional-dependencies]` in pyproject.toml; a test holds the two
together. Nothing is imported here: looking a module up does not load it.
"""

from __future__ import annotations

import importlib.util

from tierwise.core.errors import MissingExtraError

EXTRA_MODULES: dict[str, tuple[str, ...]] = {
    "curriculum": (
        "torch", "transformers", "tokenizers", "safetensors", "PIL", "sklearn", "numpy",
        "pyarrow", "math_verify", "scipy", "peft",
    ),
    "trl": ("trl", "accelerate", "datasets"),
    "offload": ("torch", "numpy", "numba"),
    "archive": ("pycdlib", "numpy"),
    "tco": ("numpy", "scipy"),
    "report": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "serve": ("starlette", "uvicorn"),
}  # fmt: skip


def require_extra(extra: str) -> None:
    """Return if everything the extra brings can be found.

    Raises:
        MissingExtraError: Something is not installed; the hint is the pip line.
    """
    for module in EXTRA_MODULES[extra]:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(
                f"tierwise {extra} needs {module}, which is not installed",
                hint=f"pip install 'tierwise[{extra}]'",
            )
