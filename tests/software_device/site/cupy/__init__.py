"""What kvmesh uses of CuPy, over files: see README.md one folder up."""

from cupy import cuda

__all__ = ["cuda"]
__version__ = "14.2.0+software"
