# G3: a stage raises while it prepares a gradient's send
group pp = 0-2

r0:
  step 1F1B n=1 { F0; S F0->1; R B0<-1; B0 }
r1:
  step 1F1B n=1 { R F0<-0; F0; S F0->2; R B0<-2; B0; S B0->0 }
r2:
  step 1F1B n=1 { R F0<-1; F0; B0; raise RuntimeError "no gradient"; S B0->1 }
