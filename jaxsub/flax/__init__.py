"""For Flax: `linen` and `nnx`, and `policies`, which puts policies on the modules of a model without editing it.

Needs the package `flax`; `import jaxsub` alone does not.
"""

try:
    import flax as _flax
except ImportError as error:
    raise ImportError('jaxsub.flax needs Flax: pip install "jaxsub[flax]"') from error

from jaxsub.flax import linen, nnx
from jaxsub.flax.overrides import Match, Swap, policies

__all__ = ["Match", "Swap", "linen", "nnx", "policies"]
del _flax
