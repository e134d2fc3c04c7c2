"""Many ranks fetch, check and apply peers' sparse contributions, each within a memory budget."""
