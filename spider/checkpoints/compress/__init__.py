"""Compress a trained model into one small file, and read it back. Works for any family and any vocabulary.

    calibrate   collect the inputs of each matrix on training text
    gptq        quantize weights to small integers, by rounding or by GPTQ
    parts       split a model into tensors that are quantized and tensors that are stored exactly
    rans        entropy-code small integers
    format      read the file; reading needs `rans`, this module and the model
    writer      write the file
    code        measure the source code that a process needs to read a file
    pipeline    compress one checkpoint, with the finest step whose file fits the cap
    predict     estimate the size of a run's file before it is trained

Importing any module of this package except `rans` imports torch.
"""
