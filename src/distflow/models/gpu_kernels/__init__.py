"""Kernels in Triton for Llama-like models on a CUDA device: a decode step, and the layers of a
training forward."""
