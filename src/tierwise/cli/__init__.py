"""The thin shell: parse, call one function, print its records."""
