"""One object for each arrow between ranks; whoever runs a plan calls their `run` in its order."""
