"""Images, audio and video: what they are, how long they are in tokens, and what a model is given of them."""
