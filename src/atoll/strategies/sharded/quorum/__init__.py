"""Steps that wait for no late rank: gradients go to the owners' servers, which commit and step."""
