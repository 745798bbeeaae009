"""Other people's training loops over the Tinker API: models that clients train and sample from,
verb by verb."""
