"""The part of CuPy that kvmesh uses, over files: see README.md one folder up."""

from numpy import uint64

from cupy import cuda
from cupy.raw import RawKernel

__all__ = ["RawKernel", "cuda", "uint64"]
__version__ = "14.2.0+software"
