"""Methods of papers, one file each (see `method_files.py`)."""
