"""Show runs to people, from the files that their jobs left. This package needs no model and no torch.

    stages, costs, provenance     read the results folder: stages and logged rows, costs, digests
    formatting, scores            format numbers and text; order scores and fill tables of scores
    charts, render                draw figures, and put them into a page or a file
    figures, ladders, text_view   define the figures
    compare, page, terminal       compare runs, write a run's page, print the terminal summary
    card                          write the model card

A page is one file that loads no other: it contains its styles, script and figures, and its content security
policy forbids the rest. So it can be mailed, archived or printed.
"""
