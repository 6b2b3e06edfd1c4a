"""The modules of tutorials and papers under their own names, one Python module for each text."""
