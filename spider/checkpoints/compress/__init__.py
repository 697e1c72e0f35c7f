"""Compress a trained model into one small file, and read it back. Works for any family and any vocabulary.

    quantize    turn weights into small integers, by rounding or by GPTQ on training text
    rans        entropy-code small integers
    format      read the file; reading needs `rans`, this module and the model
    writer      write the file
    pipeline    compress one checkpoint, with the finest step whose file fits the cap

Importing any module of this package except `rans` imports torch.
"""
