# G5: a slow rank is no deadlock
group pp = 0-1

r0: F7 { sleep 600 }; S F7->1
r1: R F7<-0; F7
