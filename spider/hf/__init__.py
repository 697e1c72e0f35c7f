"""Exported folders in Hugging Face's transformers: ``AutoModelForCausalLM.from_pretrained(folder)``.

    exported       what an exported folder holds for transformers, in JSON; needs neither it nor torch
    remote         the file of code in it: takes the classes from here
    announce       has `registered` run as soon as transformers' own registry is there
    registered     the classes, under the name by which a ``config.json`` asks for them
    configuration  ``config.json``
    modeling       any family's model, called as it is
    reading        what generation keeps of each row: a `spider.model.interface.Reader`
    tokenization   `spider.tokens.Tokens` behind the interface of a tokenizer

Importing this package imports nothing.
"""
