# G4: a rank is killed
group pp = 0-2

r0: F0; S F0->1; R B0<-1; B0
r1: R F0<-0; F0; die
r2: R F0<-1; F0
