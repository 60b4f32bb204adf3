"""`cupy.cuda.compiler`: the error of a kernel's source."""


class CompileException(Exception):
    pass
