"""What policy losses share, and the losses over pairs."""
