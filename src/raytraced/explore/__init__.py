"""A page that runs trained models in a browser: weights, test images and plain JavaScript in one HTML file."""
