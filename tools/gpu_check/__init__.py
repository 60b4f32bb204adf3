"""One command for a CUDA host: what is there, do the tests pass, how fast is it. See `tools/gpu_check/__main__.py`."""
