"""Show runs to people, from the files that their jobs left. This package needs no model and no torch.

stages                        read the stages of a run from the results folder
summary                       join all evaluations into summary.json, and make tables of them
tables                        show these tables as Markdown and in the terminal
figures                       draw figures by matplotlib
page, card                    write the page of a run with the jobs that made it, and the model card
"""
