"""Sources of text: one file each, with a subclass of `spider.config.Source`. The file's name is its kind."""
