"""The control plane: the API's calls, their refusals, and the loop that makes states come true."""
