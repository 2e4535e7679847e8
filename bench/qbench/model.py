def section(records):
    return []
