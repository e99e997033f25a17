"""What both doors say in words, as lines of text; each module says it of one kind of thing."""
