"""The suite; a package, so that one of the same name among what is installed does not take its place."""
