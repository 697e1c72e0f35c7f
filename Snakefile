"""The entry point of `snakemake` in this folder. The pipeline is in workflow/Snakefile, where catalogues expect it."""


include: "workflow/Snakefile"


workflow.default_target = "all"  # An included file cannot set the default target.
