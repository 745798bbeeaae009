"""distflow from Python, in a script or a notebook: `distflow.train`, `distflow.load_run`."""
