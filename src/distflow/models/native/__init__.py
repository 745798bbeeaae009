"""Native code for decode steps on a CPU, compiled where it runs (`build.py`); without a compiler torch does it all."""
