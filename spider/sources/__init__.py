"""Sources of text, a file each: a subclass of `spider.config.Source`, known by the name of its file."""
