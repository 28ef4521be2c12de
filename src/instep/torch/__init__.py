"""PyTorch: `loss.backward()` over the whole batch, by several processes."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from instep._errors import import_error

    raise import_error("PyTorch", "torch") from error

from instep.torch._pool import GradientPool as GradientPool
