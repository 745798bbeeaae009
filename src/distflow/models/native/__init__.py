"""What a CPU computes by C code, compiled where it runs (`build.py`); without a compiler torch does it all."""
