"""For Equinox: `filter_jit` with a memory for the whole step, `filter_checkpoint` with every policy.

Needs the package `equinox`; `import jaxsub` alone does not.
"""

try:
    import equinox as _equinox
except ImportError as error:
    raise ImportError('jaxsub.equinox needs Equinox: pip install "jaxsub[equinox]"') from error

from jaxsub.equinox.filtered import Checkpointed, Jitted, filter_checkpoint, filter_jit

__all__ = ["Checkpointed", "Jitted", "filter_checkpoint", "filter_jit"]
del _equinox
