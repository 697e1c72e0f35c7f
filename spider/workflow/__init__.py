"""What surrounds the jobs of a workflow: what they will read and cost, what would stop them, what runs now.

plan.py       inputs, params and resources of the rules
describe.py   parameters, FLOPs, memory and steps of a run before it is trained
doctor.py     what would stop a run on this machine
progress.py   what runs now, on the terminal
start.py      one workflow at a time in a results folder; what a scheduler refuses
clean.py      what no configuration reaches
"""
