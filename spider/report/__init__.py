"""What a person sees of a run, drawn from the files that its jobs have left: no model, no torch.

    stages, costs, provenance     what the results folder holds: stages and logged rows, price, digests
    formatting                    numbers and text
    charts, render                the one chart engine: what is drawn; how a page or a file shows it
    figures, scaling, text_view   which figures there are
    compare, page, screen         runs side by side, a run's page, the last words

A page is one file that needs no other: styles, script and figures are in it, and its content security policy
forbids the rest. So it can be mailed, archived or printed.
"""
