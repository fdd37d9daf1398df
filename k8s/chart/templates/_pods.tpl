{{- define "manta.headPod" -}}
metadata:
  labels:
    {{- include "manta.labels" (list . "head") | nindent 4 }}
  annotations:
    {{- include "manta.stayingAnnotations" . | nindent 4 }}
spec:
  serviceAccountName: {{ include "manta.name" . }}-head
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 60
  securityContext:
    {{- include "manta.raySecurity" . | nindent 4 }}
  containers:
    - name: ray-head
      image: {{ include "manta.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: serve, containerPort: 8000}
        - {name: metrics, containerPort: 8080}
        - {name: haproxy, containerPort: 9101}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
      env:
        {{- include "manta.rayEnv" . | nindent 8 }}
        {{- include "manta.secretEnv" . | nindent 8 }}
      resources:
        {{- include "manta.resources" (list .Values.head.resources 0) | nindent 8 }}
      securityContext:
        {{- include "manta.containerSecurity" . | nindent 8 }}
      {{- include "manta.aliveProbes" . | nindent 6 }}
      # Generous: a head that is not ready is not in its Service, and no worker finds it.
      readinessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 10
      lifecycle:
        preStop:
          exec: {command: [/opt/manta/k8s/images/pre-stop.sh, "0"]}
      volumeMounts:
        {{- include "manta.rayMounts" . | nindent 8 }}
  volumes:
    {{- include "manta.rayVolumes" (list .Values.head.shm .Values.head.logs .Values.head.homeCache) | nindent 4 }}
    - name: api-token
      projected:
        sources:
          - serviceAccountToken: {path: token, expirationSeconds: 3600}
          - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
          - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}

{{- define "manta.routerPod" -}}
metadata:
  labels:
    {{- include "manta.labels" (list . "router") | nindent 4 }}
  annotations:
    {{- include "manta.stayingAnnotations" . | nindent 4 }}
spec:
  {{- include "manta.workerSpec" . | nindent 2 }}
  {{- if .Values.router.spread }}
  topologySpreadConstraints:
    {{- include "manta.spread" (list . "router" "kubernetes.io/hostname" "DoNotSchedule") | nindent 4 }}
    {{- include "manta.spread" (list . "router" "topology.kubernetes.io/zone" "ScheduleAnyway") | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-worker
      image: {{ include "manta.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      ports:
        {{- include "manta.workerPorts" . | nindent 8 }}
        # The router's own: the first of 30000 to 30007, and the next while a restart replaces it.
        - {name: router, containerPort: 30000}
        - {name: router-next, containerPort: 30001}
      env:
        {{- include "manta.workerEnv" . | nindent 8 }}
        {{- range .Values.keys }}
        - name: {{ . }}
          valueFrom: {secretKeyRef: {name: {{ $.Values.secrets.keys }}, key: {{ . }}}}
        {{- end }}
      resources:
        {{- include "manta.resources" (list .Values.router.resources 0) | nindent 8 }}
      {{- include "manta.workerLife" . | nindent 6 }}
      volumeMounts:
        {{- include "manta.rayMounts" . | nindent 8 }}
        {{- if .Values.model.enabled }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
  volumes:
    {{- include "manta.rayVolumes" (list .Values.router.shm .Values.router.logs .Values.router.homeCache) | nindent 4 }}
    {{- include "manta.modelVolume" . | nindent 4 }}
{{- end }}

{{- /* (list $ engine) */}}
{{- define "manta.enginePod" -}}
{{- $ := first . -}}
{{- $engine := last . -}}
metadata:
  labels:
    {{- include "manta.labels" (list $ $engine.role) | nindent 4 }}
  annotations:
    {{- include "manta.stayingAnnotations" $ | nindent 4 }}
spec:
  {{- include "manta.workerSpec" $ | nindent 2 }}
  {{- with $engine.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $engine.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $engine.spread }}
  # KV crosses hosts: one zone, and as many hosts as there are.
  affinity:
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: topology.kubernetes.io/zone
            labelSelector:
              matchLabels:
                {{- include "manta.partOf" $ | nindent 16 }}
              matchExpressions:
                - {key: app.kubernetes.io/component, operator: In, values: [unified, decode, prefill]}
  topologySpreadConstraints:
    {{- include "manta.spread" (list $ $engine.role "kubernetes.io/hostname" "ScheduleAnyway") | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-worker
      image: {{ include "manta.image" $ }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      ports:
        {{- include "manta.workerPorts" $ | nindent 8 }}
        {{- if $engine.nixlPort }}
        - {name: nixl, containerPort: {{ $engine.nixlPort }}}
        {{- end }}
      env:
        {{- include "manta.workerEnv" $ | nindent 8 }}
      resources:
        {{- include "manta.resources" (list $engine.resources $engine.gpus) | nindent 8 }}
      {{- include "manta.workerLife" $ | nindent 6 }}
      volumeMounts:
        {{- include "manta.rayMounts" $ | nindent 8 }}
        {{- if $.Values.model.enabled }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $engine.kv }}
        - {name: kv, mountPath: /mnt/manta}
        {{- end }}
  volumes:
    {{- include "manta.rayVolumes" (list $engine.shm $engine.logs $engine.homeCache) | nindent 4 }}
    {{- include "manta.modelVolume" $ | nindent 4 }}
    {{- if and $engine.kv $engine.kvStorageClass }}
    - name: kv
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes: [ReadWriteOnce]
            storageClassName: {{ $engine.kvStorageClass }}
            resources:
              requests:
                storage: {{ $engine.kv }}
    {{- else if $engine.kv }}
    - name: kv
      emptyDir: {sizeLimit: {{ $engine.kv }}}
    {{- end }}
{{- end }}

{{- define "manta.workerSpec" -}}
serviceAccountName: {{ include "manta.name" . }}-worker
automountServiceAccountToken: false
# A Service named `vllm` would set VLLM_PORT to a URL, and no engine would start.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.times.grace }}
securityContext:
  {{- include "manta.raySecurity" . | nindent 2 }}
{{- if .Values.model.enabled }}
initContainers:
  {{- include "manta.waitForModel" . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "manta.workerPorts" -}}
- {name: serve, containerPort: 8000}
- {name: metrics, containerPort: 8080}
- {name: haproxy, containerPort: 9101}
{{- end }}

{{- define "manta.workerLife" -}}
securityContext:
  {{- include "manta.containerSecurity" . | nindent 2 }}
{{ include "manta.aliveProbes" . }}
# Serve's HAProxy says yes once it has a router to send to. A pod on which Serve runs nothing is not ready, which is
# right: KubeRay's Service sends clients to every worker that is.
readinessProbe:
  httpGet: {path: /-/healthz, port: 8000}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
lifecycle:
  preStop:
    exec: {command: [/opt/manta/k8s/images/pre-stop.sh, {{ .Values.times.drain | toString | quote }}]}
{{- end }}

{{- define "manta.modelVolume" -}}
{{- if .Values.model.enabled -}}
- name: models
  persistentVolumeClaim: {claimName: {{ include "manta.name" . }}-models, readOnly: true}
{{- end }}
{{- end }}
