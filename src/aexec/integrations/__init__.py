"""Where aexec meets other people's programs; each module needs the package it is named after."""
