"""A trained model compressed into one small file, and read back: any family, any alphabet.

    calibrate   what enters each matrix, on training text
    gptq        weights to small integers: rounded, or rounded so that what a matrix makes stays close
    rans        small integers to bytes, near their entropy
    classes     rows alike, which share a table
    format      the file: what is in it, and read; reading needs these three and the model
    writer      the same, written
    code        the source that a process needs to read one, counted with it
    parts       a model's tensors, split into what becomes integers and what stays
    fit         the coarsest step whose file is no larger than it may be
    compress       all of that, for one checkpoint

Importing a module of this package, but `rans`, imports torch.
"""
