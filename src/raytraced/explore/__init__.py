"""A page in which trained models run: weights, images and a few hundred lines of JavaScript in one file."""
