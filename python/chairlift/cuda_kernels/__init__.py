"""The CUDA kernels seen from Python: their parameters, instantiations, compilation and work lists.

Nothing here needs a GPU. ``cuda.bindings`` is imported only to compile.
"""
