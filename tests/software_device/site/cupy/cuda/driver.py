"""`cupy.cuda.driver`: the error of a launch."""


class CUDADriverError(RuntimeError):
    status = 0
